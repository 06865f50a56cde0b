"""How well passages of long documents are found: documents that are made up, with facts at known places."""
