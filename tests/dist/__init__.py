"""The files of a release: what is in them, and that they work without the source tree."""
