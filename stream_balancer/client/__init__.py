"""The processes of ranks and producers."""
