"""``th.harvest`` stores values from a model over a whole data set. ``th.open`` reads them."""
