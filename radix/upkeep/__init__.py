"""What is done to a whole tree, and seldom: a full recount, and taking out what nobody asks for."""
