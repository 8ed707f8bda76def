"""The pages of the firewalls' rules, one Markdown file each, read by `enginesmith explain`."""
