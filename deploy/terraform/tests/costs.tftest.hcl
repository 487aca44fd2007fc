# What the outputs say a fleet costs, against a calculation by hand. deploy/terraform/README.md shows the same numbers.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit         = "0123456789abcdef0123456789abcdef01234567"
  alarm_email    = "someone@example.org"
  delete_results = true # so that the test can delete what it creates
}

# US dollars of a month: 814.40 instances, which are 730 h x (0.1323 + 0.8048 + 2 x 0.1785 x 0.4 + 0.0893 x 0.4); 16.00 for
# 200 GiB of disks; 36.50 for 5 endpoints; 5.50 key, private zone and snapshots. Together 872.40, of which an hour is 1.20.
run "small" {
  assert {
    condition     = output.estimated_usd == { hour = "1.20", month = "872", month_stopped = "6", prices = "us-east-1, 2026-11" }
    error_message = "An hour and a month of small cost as by hand: not ${jsonencode(output.estimated_usd)}."
  }
}

# 1584.39 instances, 27.20 disks, 36.50 endpoints, 5.50 as above: together 1653.59, an hour 2.27.
run "paper" {
  variables {
    size = "paper"
  }

  assert {
    condition     = output.estimated_usd == { hour = "2.27", month = "1654", month_stopped = "6", prices = "us-east-1, 2026-11" }
    error_message = "An hour and a month of paper cost as by hand: not ${jsonencode(output.estimated_usd)}."
  }
}

run "prices_that_are_not_known_are_not_made_up" {
  variables {
    instance_types = { actor = ["c9x.large"] }
  }

  assert {
    condition     = startswith(output.estimated_usd.hour, "unknown") && startswith(output.estimated_usd.month, "unknown")
    error_message = "The cost says what it does not know: ${jsonencode(output.estimated_usd)}."
  }
}
