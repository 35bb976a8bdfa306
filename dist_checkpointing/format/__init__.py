"""What a checkpoint folder says about itself: boxes, dtypes, index, checksums, seal, commit."""
