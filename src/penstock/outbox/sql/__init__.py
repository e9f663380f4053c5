"""The schema `tide`: its functions, and what installs them."""
