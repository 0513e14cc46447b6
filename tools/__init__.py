"""Tools that write the embedded images, and the tables of the documents."""
