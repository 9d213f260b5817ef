"""One rule's check a module; `rule.toml` says which."""
