"""What a tensor looks like: its numbers, and how it is laid out as a picture. Nothing here knows what it is about."""
