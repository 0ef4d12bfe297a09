"""What a run is judged to be: causes, coverage, the golden event, as diagnosis makes them and a session keeps them."""
