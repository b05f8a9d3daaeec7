"""What command lines share: how a program ends, what a terminal shows, a conversation."""
