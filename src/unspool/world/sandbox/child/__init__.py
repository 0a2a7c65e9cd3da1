"""What runs in the sandbox's own process: standard library only, loaded from this folder, never with unspool."""
