"""Ways of getting samples to the device, one a file, and the choice among them."""
