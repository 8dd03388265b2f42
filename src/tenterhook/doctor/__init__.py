"""The report on an installation: versions, features that work, packages and settings."""
