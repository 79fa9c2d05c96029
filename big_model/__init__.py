"""Support for big models: device maps, offloaded weights, and loading other tools' weight files."""
