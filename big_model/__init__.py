"""Big models: device maps, offloaded weights, and loading weight files that other tools wrote."""
