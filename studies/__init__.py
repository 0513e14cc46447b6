"""Studies: train the models of the published tables and compare the results."""
