"""The controller's process: serving ranks and producers."""
