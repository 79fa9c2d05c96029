"""Support for big models: device maps, offloaded weights, and loading weight files of other tools."""
