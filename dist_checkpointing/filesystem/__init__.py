"""Where the bytes of a checkpoint live: paths, atomic and durable writes, locks."""
