"""What the engine serves, written down: tomorrow's traces. Knows no engine; the engine's thread only hands over."""
