"""Several engines of one model behind one port: who is asked, what is passed on, and who is started again."""
