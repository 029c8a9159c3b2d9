"""The former name of `hidden_states`; only the path of its connector still works."""
