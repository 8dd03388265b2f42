"""Other libraries, each loaded only when it is used."""
