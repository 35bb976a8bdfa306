"""What a person does with a checkpoint; nothing in the library imports it."""
