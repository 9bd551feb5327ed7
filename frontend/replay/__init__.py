"""`coppice replay`: a trace through the real tree and scheduler, and the page that shows it."""
