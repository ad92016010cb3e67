"""Is this code what we know? Code is read and run with stand-ins before a fast path takes its place."""
