// Names nothing of h2o.
