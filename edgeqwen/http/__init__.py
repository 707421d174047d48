"""HTTP on the same socket. Imported when the first HTTP byte comes, and the HTTP library with it."""
