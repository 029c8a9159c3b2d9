"""The commands: a parser and a thin function each, over the rooms below."""
