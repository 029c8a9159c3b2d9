"""Text files and tables: JSONL, CSV, Parquet, data frames."""
