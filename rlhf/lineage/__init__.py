"""What made a registered version, and making it again: the top of the library beside `ask`, and no part of a stage."""
