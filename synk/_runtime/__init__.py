"""Runtime: devices, and how compiled programs run on them."""
