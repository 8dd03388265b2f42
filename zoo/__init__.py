"""The zoo: tenterhook's promises, checked on every architecture that can be built without a download."""
