# The budget, which cannot be applied to moto.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit = "0123456789abcdef0123456789abcdef01234567"
}

run "budget_by_mail" {
  variables {
    alarm_email        = "someone@example.org"
    monthly_budget_usd = 100
    delete_results     = true
  }

  assert {
    condition     = aws_sns_topic_subscription.email[0].endpoint == "someone@example.org" && aws_budgets_budget.month[0].limit_amount == "100"
    error_message = "Alarms and the budget write to the address."
  }
  assert {
    condition = toset([
      for one in aws_budgets_budget.month[0].notification :
      join(" ", [one.notification_type, one.comparison_operator, one.threshold, one.threshold_type, join(",", one.subscriber_email_addresses)])
      ]) == toset([
      for when in ["ACTUAL GREATER_THAN 80", "ACTUAL GREATER_THAN 100", "FORECASTED GREATER_THAN 100"] : "${when} PERCENTAGE someone@example.org"
    ])
    error_message = "The budget writes at 80 and 100 % of it, and when more is forecast: a forecast comes late, or never in a new account."
  }
}
