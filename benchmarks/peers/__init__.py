"""The same work done by other libraries, each in a process and an environment of its own."""
