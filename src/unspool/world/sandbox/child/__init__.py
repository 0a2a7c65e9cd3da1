"""What runs in the sandbox's own process: standard library only, sent to it as code, never with unspool."""
