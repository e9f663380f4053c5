"""`penstock try`: messages through one sink's filter, transform and route, without delivering them."""
