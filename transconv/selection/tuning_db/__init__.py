"""The tuning database: records, files, nearest problems, transfer to other problems."""
