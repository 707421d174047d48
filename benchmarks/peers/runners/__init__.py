"""One program for each peer, run by the peer's own interpreter: nothing of edgeqwen's may be imported here."""
