"""The test-suite; CONTRIBUTING.md says how it is laid out."""
