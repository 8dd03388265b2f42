"""Where recorded values go: rows in shards on disk or in an object store."""
