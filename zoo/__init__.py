"""The zoo: tenterhook's guarantees, checked on every architecture that can be built without a download."""
