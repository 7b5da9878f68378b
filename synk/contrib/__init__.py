"""Works and is tested, and may change between versions."""
