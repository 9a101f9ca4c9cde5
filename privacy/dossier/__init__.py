"""Drafts for the hospital's data protection file: every sentence that states a fact names the records that prove it."""
