"""What a maintainer runs to make and check the files of a release. Nothing of it is installed."""
