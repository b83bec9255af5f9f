"""Labs for two CPU cores: start the scripts with bash from anywhere."""
