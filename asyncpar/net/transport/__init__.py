"""Lanes carry frames; links bundle what goes between two ranks; nothing here knows about collectives or actors."""
