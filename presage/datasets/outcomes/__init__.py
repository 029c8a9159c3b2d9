"""Outcomes: which model solved which prompt. Rows in, one matrix of prompts and models out."""
