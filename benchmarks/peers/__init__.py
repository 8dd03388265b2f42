"""The same work in other libraries, each in its own process and environment."""
