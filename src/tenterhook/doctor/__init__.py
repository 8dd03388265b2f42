"""Report of an installation: versions, features that work, packages and settings."""
