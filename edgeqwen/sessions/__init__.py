"""Conversations that the daemon keeps: who has which, their text on disk, and their turns."""
