"""Many spellings of one idea become one, so that the rule table stays small."""
